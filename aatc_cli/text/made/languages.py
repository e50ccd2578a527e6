"""Simple sentences in German, French, Spanish, Italian and Dutch, one language a document."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class _Language:
    """Parts of sentences that go together in any choice. who: subjects; does: verbs with their objects."""

    who: tuple[str, ...]
    does: tuple[str, ...]
    where: tuple[str, ...]
    when: tuple[str, ...]
    but: tuple[str, ...]


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";"))


_LANGUAGES = (
    _Language(
        who=_parts(
            "der alte Lehrer; meine Schwester; die Nachbarin; ein junger Arzt; der Bäcker; unser Großvater; das Kind; "
            "die Köchin; der Gärtner; eine fremde Frau"
        ),
        does=_parts(
            "kaufte ein neues Buch; schrieb einen langen Brief; reparierte das Fahrrad; verlor den Schlüssel; "
            "öffnete die Tür; hörte leise Musik; trank eine Tasse Kaffee; suchte die Katze; malte ein Bild; "
            "verkaufte den Wagen"
        ),
        where=_parts(
            "am Bahnhof; in der Küche; auf dem Markt; hinter dem Haus; im Garten; vor der Schule; an der Brücke"
        ),
        when=_parts("am Morgen; gestern Abend; im Winter; nach dem Essen; jeden Sonntag; vor zwei Jahren; um acht Uhr"),
        but=_parts(
            "aber niemand hat es bemerkt; und dann begann es zu regnen; weil die Zeit knapp war; obwohl es spät war; "
            "und alle waren zufrieden"
        ),
    ),
    _Language(
        who=_parts(
            "le vieux professeur; ma sœur; la voisine; un jeune médecin; le boulanger; notre grand-père; l'enfant; "
            "la cuisinière; le jardinier; une étrangère"
        ),
        does=_parts(
            "a acheté un nouveau livre; a écrit une longue lettre; a réparé le vélo; a perdu la clé; "
            "a ouvert la porte; a écouté de la musique; a bu une tasse de café; a cherché le chat; "
            "a peint un tableau; a vendu la voiture"
        ),
        where=_parts(
            "à la gare; dans la cuisine; au marché; derrière la maison; dans le jardin; devant l'école; près du pont"
        ),
        when=_parts("ce matin; hier soir; en hiver; après le repas; chaque dimanche; il y a deux ans; à huit heures"),
        but=_parts(
            "mais personne ne l'a remarqué; et puis il a commencé à pleuvoir; parce que le temps manquait; "
            "bien qu'il soit tard; et tout le monde était content"
        ),
    ),
    _Language(
        who=_parts(
            "el viejo maestro; mi hermana; la vecina; un joven médico; el panadero; nuestro abuelo; el niño; "
            "la cocinera; el jardinero; una mujer desconocida"
        ),
        does=_parts(
            "compró un libro nuevo; escribió una carta larga; arregló la bicicleta; perdió la llave; abrió la puerta; "
            "escuchó música; bebió una taza de café; buscó el gato; pintó un cuadro; vendió el coche"
        ),
        where=_parts(
            "en la estación; en la cocina; en el mercado; detrás de la casa; en el jardín; delante de la escuela; "
            "junto al puente"
        ),
        when=_parts(
            "esta mañana; ayer por la noche; en invierno; después de comer; cada domingo; hace dos años; a las ocho"
        ),
        but=_parts(
            "pero nadie se dio cuenta; y entonces empezó a llover; porque faltaba tiempo; aunque era tarde; "
            "y todos quedaron contentos"
        ),
    ),
    _Language(
        who=_parts(
            "il vecchio maestro; mia sorella; la vicina; un giovane medico; il fornaio; nostro nonno; il bambino; "
            "la cuoca; il giardiniere; una straniera"
        ),
        does=_parts(
            "ha comprato un libro nuovo; ha scritto una lunga lettera; ha riparato la bicicletta; ha perso la chiave; "
            "ha aperto la porta; ha ascoltato la musica; ha bevuto una tazza di caffè; ha cercato il gatto; "
            "ha dipinto un quadro; ha venduto la macchina"
        ),
        where=_parts(
            "alla stazione; in cucina; al mercato; dietro la casa; nel giardino; davanti alla scuola; vicino al ponte"
        ),
        when=_parts("stamattina; ieri sera; in inverno; dopo pranzo; ogni domenica; due anni fa; alle otto"),
        but=_parts(
            "ma nessuno se n'è accorto; e poi ha cominciato a piovere; perché mancava il tempo; anche se era tardi; "
            "e tutti erano contenti"
        ),
    ),
    _Language(
        who=_parts(
            "de oude leraar; mijn zus; de buurvrouw; een jonge arts; de bakker; onze grootvader; het kind; de kokkin; "
            "de tuinman; een vreemde vrouw"
        ),
        does=_parts(
            "kocht een nieuw boek; schreef een lange brief; repareerde de fiets; verloor de sleutel; opende de deur; "
            "hoorde zachte muziek; dronk een kop koffie; zocht de kat; schilderde een doek; verkocht de auto"
        ),
        where=_parts(
            "op het station; in de keuken; op de markt; achter het huis; in de tuin; voor de school; bij de brug"
        ),
        when=_parts("vanmorgen; gisteravond; in de winter; na het eten; elke zondag; twee jaar geleden; om acht uur"),
        but=_parts(
            "maar niemand heeft het gemerkt; en toen begon het te regenen; omdat er weinig tijd was; "
            "hoewel het laat was; en iedereen was tevreden"
        ),
    ),
)


def languages_document(random: Random) -> str:
    """Some two dozen sentences in one of the languages."""
    language = random.choice(_LANGUAGES)
    said = []
    for _ in range(24):
        parts = [random.choice(part) for part in (language.who, language.does, language.where, language.when)]
        sentence = " ".join(parts)
        end = f", {random.choice(language.but)}." if random.random() < 0.4 else "."
        said.append(sentence[0].upper() + sentence[1:] + end)
    return " ".join(said) + "\n"
